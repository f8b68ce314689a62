"""A network that is written in the config, as in `layers: c16 n r p2 f l10`."""

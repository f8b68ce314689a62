"""What passes through a training, written down as digests by a plugin, and compared between runs."""

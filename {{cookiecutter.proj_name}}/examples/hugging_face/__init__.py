"""A language model of transformers on texts of datasets, by index or as a stream."""

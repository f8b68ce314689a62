"""A present-day recipe for image classifiers as one config; its augmentation."""

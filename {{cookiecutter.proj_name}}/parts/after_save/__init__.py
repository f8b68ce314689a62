"""Functions that are called with each saved checkpoint, in the background: uploads, copies to another disk."""

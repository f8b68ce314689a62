"""Checkpoints: named parts of a run in one file, written atomically, and the guarantees of a resume.

`file` reads and writes one, `folder` keeps those of a run, `saver` writes in the background, `state` collects the
parts of a run, `weights` loads models, `fingerprint` collects and compares what decides the bits, `guarantee` says how
exact a resume is.
`python -m tools.checkpoint FILE` prints the contents of one.
"""

"""Checkpoints: what a run saves, in one file, written atomically, and how exact a resume is.

`file` reads and writes one, `folder` keeps those of a run, `saver` writes in the background, `state` collects what is
saved, `layout` checks that it can be loaded, `weights` loads models, `resume` says how exact a resume is.
"""

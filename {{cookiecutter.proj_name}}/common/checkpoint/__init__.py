"""Checkpoints: what a run saves, in one file, written atomically, and how exact a resume is.

`file` reads one, `folder` writes and keeps those of a run, `saver` does so in the background, `state` collects what is
saved, `layout` checks that it can be loaded, `weights` loads models, `resume` says how exact a resume is.
"""

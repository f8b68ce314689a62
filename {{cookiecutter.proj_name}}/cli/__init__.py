"""What train.py, evaluate.py and the tools share: reading the command line, and what is printed first and last."""

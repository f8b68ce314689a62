"""Replay a run and certify its bits: python -m tools.verify RUN"""

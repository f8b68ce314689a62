"""Replay a run and compare its bits: python -m tools.verify RUN"""

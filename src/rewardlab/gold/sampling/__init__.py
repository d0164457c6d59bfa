"""Replies sampled from a language model."""

"""Preference data from a gold reward model, and proxies of it: sample, label, build, train, match, curve, check.

The stages meet in files only, so that each can be run alone, resumed, and replaced.
"""

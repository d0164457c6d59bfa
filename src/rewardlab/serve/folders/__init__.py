"""`rewardlab import`, `export` and `push`: a reward-model folder made of another one, or handed to a hub.

What proves such a folder is `serve/verifying`; what reads and writes one is `artifact`.
"""

"""`rewardlab gold curve`: over-optimisation, what becomes of gold as a proxy picks the best of ever more replies."""

"""`rewardlab gold match`: how well proxies match the gold model, by prompt and slice, with verdicts."""

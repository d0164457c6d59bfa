"""rewardlab: reward models you can trust."""

"""Reward-model folders made from other folders: imported, exported, uploaded."""

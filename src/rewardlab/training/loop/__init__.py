"""The steps of a run: loss, update, schedule, and which model is the best so far."""

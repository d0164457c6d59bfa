"""Is the policy exploiting the reward model? Judged on gold or held-out evidence; everything else is only shown."""

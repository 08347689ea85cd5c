"""`tidemill eval`: any agent, on any task set, in the harness of training."""

"""What chooses and makes drafts behind ``Drafts``: the policy and its times, a draft model, and a
replayed acceptance."""

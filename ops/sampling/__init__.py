"""From the last hidden states to tokens: logits, penalties, sampling and log probabilities."""

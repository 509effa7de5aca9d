"""Draft heads: small models that read the hidden states of the model for which they draft, such as
EAGLE-3 heads and the layers of a checkpoint that predict further tokens (MTP).

``read`` makes the ``ModelSpec`` of a head; ``forms`` says what tells one form of head from another.
"""

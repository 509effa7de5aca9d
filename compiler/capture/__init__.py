"""A model becomes one FX graph: one layer of each kind is traced, then all are written out."""

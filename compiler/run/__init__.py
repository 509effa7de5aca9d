"""An artifact becomes a program that runs: plan, generated code and kernels, without a compiler."""

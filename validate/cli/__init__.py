"""Commands of ``python -m overlapsim.validate``; torch is imported by those that run kernels, when they run."""

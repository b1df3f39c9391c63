//! A CUDA driver in software, for tests: not a GPU, and no timing of it means anything.

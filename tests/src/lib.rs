//! Helpers for tests that run programs as real processes.

//! Programs a user would write.

//! mpmd core

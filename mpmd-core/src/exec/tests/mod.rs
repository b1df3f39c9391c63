//! Tests of execution over special transports.

mod driven;
mod lying;

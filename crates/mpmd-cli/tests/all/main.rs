//! Tests of the program `mpmd`, one module per command.

mod bench;
mod check_schedule;
mod common;
mod doctor;
mod draw;
mod ends;
mod new;
mod plan;
mod plan_reshard;
mod run;
mod schedule;
mod top;
mod trace;

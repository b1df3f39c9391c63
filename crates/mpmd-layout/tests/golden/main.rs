//! Answers of the original systems: layouts, intermediate shardings, chunks and rules.

mod cases;
mod chunks;
mod intermediate;
mod layouts;
mod name_patterns;
mod rules;

//! Wrong programs, each with labels that say how it is found. See the README of this folder.

mod arrays;
mod first;
mod functions;
mod joining;
mod operation;
mod outside;
mod recovery;
mod server;
mod speed;
mod training;
mod weights;

use mpmd::{Commits, Program};

/// A wrong program. It runs with two processes of one device each.
pub struct Broken {
    /// Its folder and file, without the ending.
    pub name: &'static str,
    /// The text of the file, with its labels.
    pub source: &'static str,
    /// The program.
    pub run: Run,
}

/// The function of a wrong program.
#[derive(Clone, Copy)]
pub enum Run {
    /// It ends with the first loss of a process.
    Once(fn(&mut Program) -> mpmd::Result<()>),
    /// It recovers.
    Recovering(fn(&mut Program, &Commits) -> mpmd::Result<()>),
}

impl Broken {
    /// Returns the value of a label. `None` if the program does not have it.
    pub fn label(&self, name: &str) -> Option<&'static str> {
        let lines = self
            .source
            .lines()
            .filter_map(|line| line.strip_prefix("//! "));
        let mut values = lines.filter_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        values.next()
    }

    /// Returns the line at fault, from 1. `None` if messages name none.
    pub fn line_at_fault(&self) -> Option<usize> {
        let at = self
            .source
            .lines()
            .position(|line| line.ends_with("// at fault"))?;
        Some(at + 1)
    }
}

/// Lists programs by folder and file, each after the variant of its [`Run`].
macro_rules! programs {
    ($($run:ident $folder:ident :: $file:ident),* $(,)?) => {
        /// All wrong programs.
        pub const PROGRAMS: &[Broken] = &[$(Broken {
            name: concat!(stringify!($folder), "/", stringify!($file)),
            source: include_str!(concat!(stringify!($folder), "/", stringify!($file), ".rs")),
            run: Run::$run($folder::$file::run),
        }),*];
    };
}

programs! {
    Once arrays::product_of_parts_as_a_whole,
    Once arrays::rows_added_to_a_whole,
    Once arrays::rule_of_other_inputs,
    Once arrays::softmax_over_parts,
    Once arrays::sum_of_whole_rows,
    Once first::moved_on_one_process,
    Once first::other_element_type,
    Once first::rows_that_do_not_divide,
    Once first::schedule_of_more_stages,
    Once first::shards_of_a_handle,
    Once first::used_after_donation,
    Once functions::exponential_of_a_partial_sum,
    Once functions::gradient_by_indices,
    Once functions::gradient_of_rows,
    Once functions::largest_of_a_divided_dimension,
    Once functions::number_of_another_dtype,
    Once functions::rows_times_columns_of_one_axis,
    Once functions::values_of_two_meshes,
    Once joining::leaver_returns_at_once,
    Once joining::rate_beside_the_state,
    Once joining::rows_of_the_start,
    Once joining::shape_by_processes,
    Once operation::environment_of_one_process,
    Once operation::evaluation_on_one_process,
    Once operation::own_clock_ends_a_training,
    Once operation::progress_ends_a_step,
    Once operation::shards_without_a_question,
    Once outside::folder_of_each_process,
    Once outside::key_that_nothing_handles,
    Once outside::number_of_python,
    Once outside::values_not_finite,
    Once outside::weights_of_another_model,
    Recovering recovery::parts_restored_apart,
    Recovering recovery::two_states_at_a_step,
    Once server::alone_after_a_value,
    Once server::block_filled_twice,
    Once server::other_pass_on_each_process,
    Once server::skipped_position,
    Once server::slot_twice,
    Once server::stops_by_itself,
    Once server::token_without_a_row,
    Once server::version_on_one_process,
    Once speed::cost_told_by_one,
    Once speed::double_where_it_is_fast,
    Once speed::fastest_kernel_first,
    Once speed::microbatches_by_own_speed,
    Once speed::sum_by_cores,
    Once training::begun_anew,
    Once training::best_not_kept,
    Once training::ends_by_itself,
    Once training::saves_nowhere,
    Once training::text_of_each_process,
    Once weights::host_values,
    Once weights::intake_panics,
    Once weights::leaf_not_published,
    Once weights::lower_version,
    Once weights::next_on_one_process,
    Once weights::other_publication,
    Once weights::two_at_one_address,
    Once weights::wanted_twice,
}

//! The times of passes and transfers: input of the simulation and of the search for an order.

use serde::{Deserialize, Serialize};

/// The costs of all stages, in order, in one unit of time.
///
/// As TOML:
///
/// ```toml
/// unit = "s"
/// [[stage]]
/// forward = 0.010
/// backward_input = 0.012
/// backward_weight = 0.008
/// send_forward = 0.001
/// send_backward = 0.001
/// ```
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Costs {
    /// The displayed name of the unit of time: `s`, or `unit` if the costs are only relative to
    /// each other.
    #[serde(default = "relative")]
    pub unit: String,
    /// The costs, indexed by stage.
    pub stage: Vec<StageCosts>,
}

fn relative() -> String {
    "unit".to_owned()
}

/// The cost of one microbatch at a stage. Times are in [`Costs::unit`], finite and not negative.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct StageCosts {
    /// Time of a forward pass, in the unit of the costs.
    pub forward: f64,
    /// Time of the gradient of the inputs, in the unit of the costs.
    pub backward_input: f64,
    /// Time of the gradient of the parameters, in the unit of the costs.
    pub backward_weight: f64,
    /// Time to send the outputs to the next stage, if that stage is on another rank, in the unit of
    /// the costs.
    #[serde(default)]
    pub send_forward: f64,
    /// Time to send the gradient of the inputs to the previous stage, if that stage is on another
    /// rank, in the unit of the costs.
    #[serde(default)]
    pub send_backward: f64,
    /// Bytes that a forward pass keeps until the end of the input gradient.
    #[serde(default)]
    pub activation_bytes: u64,
    /// Bytes that an input gradient keeps until the end of the weight gradient.
    #[serde(default)]
    pub weight_residual_bytes: u64,
    /// Bytes of the outputs, counted if they are sent to another rank.
    #[serde(default)]
    pub output_bytes: u64,
    /// Bytes of the gradient of the inputs, counted if it is sent to another rank.
    #[serde(default)]
    pub gradient_bytes: u64,
}

impl Costs {
    /// Returns costs in which every pass takes one unit of time and transfers take none.
    pub fn units(stages: usize) -> Self {
        let stage = StageCosts {
            forward: 1.0,
            backward_input: 1.0,
            backward_weight: 1.0,
            ..StageCosts::default()
        };
        Self {
            unit: relative(),
            stage: vec![stage; stages],
        }
    }

    /// Returns true if the costs of any stage have bytes that it keeps between its passes.
    pub fn says_bytes(&self) -> bool {
        self.stage
            .iter()
            .any(|stage| stage.activation_bytes > 0 || stage.weight_residual_bytes > 0)
    }

    /// Returns the costs as TOML, with one line for each cost.
    ///
    /// # Panics
    ///
    /// If a number of bytes is above `i64::MAX`, the largest integer of TOML.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("numbers and a text")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Schedule;
    use crate::check::Channel;
    use crate::flow::Leaves;
    use crate::simulate::simulate_schedule;

    #[test]
    fn bytes_beyond_all_memory_are_simulated() {
        let schedule = Schedule::gpipe(1, 3).unwrap();
        let mut costs = Costs::units(1);
        (
            costs.stage[0].activation_bytes,
            costs.stage[0].weight_residual_bytes,
        ) = (u64::MAX, u64::MAX);
        let simulated =
            simulate_schedule(&schedule, &costs, Leaves::AtOnce, Channel::Tags).unwrap();
        let most = simulated.memory[0]
            .iter()
            .map(|point| point.used)
            .fold(0.0, f64::max);
        assert_eq!(most, i64::MAX as f64);
    }

    #[test]
    fn fuzz_costs() {
        let schedule = Schedule::gpipe(2, 2).unwrap();
        let mut costs = Costs::units(2);
        let plain = costs.to_toml();
        costs.stage[1] = StageCosts {
            send_forward: 0.5,
            activation_bytes: 100,
            output_bytes: 7,
            ..costs.stage[0]
        };
        mpmd_fuzz::bytes(
            "costs",
            &[plain.into_bytes(), costs.to_toml().into_bytes()],
            |bytes| {
                let Ok(read) = toml::from_str::<Costs>(&String::from_utf8_lossy(bytes)) else {
                    return;
                };
                let again: Costs = toml::from_str(&read.to_toml()).unwrap();
                // NaN costs differ from themselves, so compare their text.
                assert_eq!(format!("{again:?}"), format!("{read:?}"));
                if let Ok(simulated) =
                    simulate_schedule(&schedule, &read, Leaves::AtOnce, Channel::Tags)
                {
                    drop(simulated.timeline("x", &read.unit));
                }
            },
        );
    }
}

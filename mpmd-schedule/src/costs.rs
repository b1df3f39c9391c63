//! What passes and moves cost: what the simulation and the search for an order are given.

use std::fmt::Write;

use serde::{Deserialize, Serialize};

/// The costs of each stage, in order, in any unit of time that all have in common.
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
    /// What one is, for people: `s`, or `unit` where costs are only relative to each other.
    #[serde(default = "relative")]
    pub unit: String,
    /// By stage.
    pub stage: Vec<StageCosts>,
}

fn relative() -> String {
    "unit".to_owned()
}

/// What one microbatch costs at a stage. Costs are finite and not negative.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct StageCosts {
    /// A forward pass.
    pub forward: f64,
    /// The gradient of the inputs.
    pub backward_input: f64,
    /// The gradient of the parameters.
    pub backward_weight: f64,
    /// The outputs' way to the next stage, where that is on another rank.
    #[serde(default)]
    pub send_forward: f64,
    /// The way of the gradient of the inputs to the stage before, where that is on another rank.
    #[serde(default)]
    pub send_backward: f64,
    /// Bytes that a forward pass leaves until the input gradient has ended.
    #[serde(default)]
    pub activation_bytes: u64,
    /// Bytes that an input gradient leaves until the weight gradient has ended.
    #[serde(default)]
    pub weight_residual_bytes: u64,
    /// Bytes of the outputs, where they go to another rank.
    #[serde(default)]
    pub output_bytes: u64,
    /// Bytes of the gradient of the inputs, where it goes to another rank.
    #[serde(default)]
    pub gradient_bytes: u64,
}

impl Costs {
    /// Every pass takes one, moves take nothing.
    pub fn units(stages: usize) -> Self {
        let stage = StageCosts {
            forward: 1.0,
            backward_input: 1.0,
            backward_weight: 1.0,
            ..StageCosts::default()
        };
        Self { unit: relative(), stage: vec![stage; stages] }
    }

    /// Whether it says how many bytes any stage keeps between its passes.
    pub fn says_bytes(&self) -> bool {
        self.stage.iter().any(|stage| stage.activation_bytes > 0 || stage.weight_residual_bytes > 0)
    }

    /// As TOML, by hand: one line for each cost.
    pub fn to_toml(&self) -> String {
        self.to_toml_in("stage")
    }

    /// The same, with its stages below this name.
    pub(super) fn to_toml_in(&self, stages: &str) -> String {
        let mut text = format!("unit = {}\n", super::sidecar::quoted(&self.unit));
        for stage in &self.stage {
            let StageCosts {
                forward,
                backward_input,
                backward_weight,
                send_forward,
                send_backward,
                ..
            } = stage;
            let (activation, weight) = (stage.activation_bytes, stage.weight_residual_bytes);
            let (output, gradient) = (stage.output_bytes, stage.gradient_bytes);
            let _ = write!(
                text,
                "\n[[{stages}]]\nforward = {forward:?}\nbackward_input = {backward_input:?}\n\
                 backward_weight = {backward_weight:?}\nsend_forward = {send_forward:?}\n\
                 send_backward = {send_backward:?}\nactivation_bytes = {activation}\n\
                 weight_residual_bytes = {weight}\noutput_bytes = {output}\ngradient_bytes = \
                 {gradient}\n"
            );
        }
        text
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
        (costs.stage[0].activation_bytes, costs.stage[0].weight_residual_bytes) =
            (u64::MAX, u64::MAX);
        let simulated =
            simulate_schedule(&schedule, &costs, Leaves::AtOnce, Channel::TAGS).unwrap();
        let most = simulated.memory[0].iter().map(|point| point.used).fold(0.0, f64::max);
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
        mpmd_fuzz::bytes("costs", &[plain.into_bytes(), costs.to_toml().into_bytes()], |bytes| {
            let Ok(read) = toml::from_str::<Costs>(&String::from_utf8_lossy(bytes)) else { return };
            let again: Costs = toml::from_str(&read.to_toml()).unwrap();
            // Costs that are not a number differ from themselves.
            assert_eq!(format!("{again:?}"), format!("{read:?}"));
            if let Ok(simulated) =
                simulate_schedule(&schedule, &read, Leaves::AtOnce, Channel::TAGS)
            {
                drop(simulated.timeline("x", &read.unit));
            }
        });
    }
}

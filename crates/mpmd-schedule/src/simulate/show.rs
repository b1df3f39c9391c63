//! Converts a simulation to a [`Timeline`].

use super::Simulated;
use crate::check::Names;
use crate::flow::Flow;
use crate::timeline::{Bar, Timeline, TimelineGap, TimelineRow};

impl Simulated {
    /// Converts the simulation to a timeline with bars, transfers and gaps, one row for each lane.
    /// The memory curves stay empty, because a flow has no data on memory. `unit` is the unit of
    /// the times: `s` or `unit`.
    pub fn timeline(&self, flow: &Flow, names: &dyn Names, title: &str, unit: &str) -> Timeline {
        let mut rows: Vec<TimelineRow> = flow
            .lanes
            .iter()
            .enumerate()
            .map(|(lane, process)| TimelineRow {
                name: names.lane(lane as u32, *process),
                process: Some(*process),
                ..TimelineRow::default()
            })
            .collect();

        let pauses = self.pauses(flow);
        let gaps: Vec<Vec<TimelineGap>> = pauses
            .iter()
            .map(|pauses| {
                let gap = |pause: &super::LanePause| TimelineGap {
                    start: pause.start,
                    end: pause.end,
                    waits_for: self.waited_for(flow, pause, names),
                };
                pauses.iter().map(gap).collect()
            })
            .collect();

        let mut next = vec![0; rows.len()];
        for (number, (node, span)) in flow.nodes.iter().zip(&self.nodes).enumerate() {
            let lane = node.lane as usize;
            let bars = &mut rows[lane].bars;
            if let (true, Some(last)) = (names.is_rest(node.tag), bars.last_mut())
                && last.end == span.start
            {
                last.end = span.end;
                continue;
            }

            let mut bar = Bar {
                start: span.start,
                end: span.end,
                ..names.bar(node.tag)
            };

            let pause = pauses[lane].get(next[lane]);
            if pause.is_some_and(|pause| pause.node == Some(number as u32)) {
                bar.waited_for = Some(gaps[lane][next[lane]].waits_for.clone());
                next[lane] += 1;
            }
            bars.push(bar);
        }

        for (row, gaps) in rows.iter_mut().zip(gaps) {
            row.gaps = gaps;
        }

        for (transfer, span) in flow.transfers.iter().zip(&self.transfers) {
            let lane = match transfer.after {
                u32::MAX => flow
                    .lanes
                    .iter()
                    .position(|process| *process == transfer.from),
                node => Some(flow.nodes[node as usize].lane as usize),
            };
            let Some(row) = lane.and_then(|lane| rows.get_mut(lane)) else {
                continue;
            };

            let bytes = (transfer.bytes > 0).then_some(transfer.bytes);
            let to = flow
                .lanes
                .iter()
                .position(|process| *process == transfer.to)
                .map(|lane| lane as u32);
            row.moves.push(Bar {
                start: span.start,
                end: span.end,
                bytes,
                to,
                ..names.moved(transfer.tag)
            });
        }

        for row in &mut rows {
            row.moves
                .sort_by(|a, b| a.start.total_cmp(&b.start).then(a.end.total_cmp(&b.end)));
        }

        Timeline {
            title: title.to_owned(),
            unit: unit.to_owned(),
            memory_unit: String::new(),
            end: self.makespan,
            rows,
            ..Timeline::default()
        }
    }
}

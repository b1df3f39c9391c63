//! The server in a loop of its program.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::Instant;

use futures::executor::block_on;
use mpmd::ProcessId;
use mpmd::testing::Simulation;
use mpmd_models::{Folder, Room, Sampling, Stages};
use mpmd_serve::{
    Engine, QueueLimits, ReplyEvent, SchedulerSizes, ServerPhase, Serving, ServingTurn,
    TextRequest, queue,
};

use crate::engine::{Drain, Expected, expected};
use crate::folder::path;

#[test]
fn other_work_reaches_all_processes_at_once() {
    const WORK: u32 = 12;
    let Expected { prompt, greedy } = expected("plain");
    let folder = Folder::open(path("plain")).unwrap();
    let sizes = SchedulerSizes {
        lanes: 2,
        sequences: 4,
        blocks: 60,
        chunk: 24,
        positions: 128,
    };
    let model = Stages::new(&folder, 2, sizes.positions).unwrap();
    let (queue, arrivals) = queue(QueueLimits::default());
    let engine = Engine::new(sizes, arrivals);
    let (waker, engine) = (engine.waker(), Mutex::new(Some(engine)));
    let work: Mutex<VecDeque<u32>> = Mutex::default();
    let done: Mutex<Vec<(usize, u32)>> = Mutex::default();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while queue.phase() == ServerPhase::Starting {
                std::thread::yield_now();
            }
            let drain = Drain(&queue);
            let start = Instant::now();
            for number in 0..WORK {
                work.lock().unwrap().push_back(number);
                waker.wake();
                while done.lock().unwrap().len() < 2 * (number as usize + 1) {
                    assert!(start.elapsed().as_secs() < 60, "no work");
                    std::thread::yield_now();
                }
            }
            // An engine that nobody wakes looks for work each second.
            assert!(
                start.elapsed().as_secs() < u64::from(WORK) / 2,
                "{:?}",
                start.elapsed()
            );
            let (max_tokens, sampling) = (greedy.len(), Sampling::default());
            let (prompt, ends) = (prompt.clone(), Vec::new());
            let request = TextRequest {
                prompt,
                max_tokens,
                sampling,
                ends,
                logprobs: None,
            };
            let mut stream = queue.submit(request).unwrap();
            work.lock().unwrap().extend(WORK..2 * WORK);
            let mut tokens = Vec::new();
            while let Some(ReplyEvent::Token(token)) = block_on(stream.next()) {
                tokens.push(token.id);
            }
            assert_eq!(tokens, greedy, "between other work");
            drop((stream, drain));
        });
        let results = Simulation::new(2, 2).run(|p| {
            let meshes = model.meshes(|stage| stage)?;
            let room = Room {
                blocks: sizes.blocks,
                sequences: sizes.sequences,
            };
            let mut inference = model.inference(p, &meshes, room, false)?;
            let own = || engine.lock().unwrap().take();
            let mut own = (p.process() == ProcessId(0)).then(own).flatten();
            let mut serving = Serving::start(p, &mut inference, 2, own.as_mut())?;
            loop {
                match serving.turn(p, || work.lock().unwrap().pop_front())? {
                    ServingTurn::Served => {}
                    ServingTurn::Other(number) => {
                        done.lock().unwrap().push((p.process().index(), number));
                    }
                    ServingTurn::Ended => return Ok(()),
                }
            }
        });
        results.into_iter().for_each(|result| result.unwrap());
    });
    let done = done.into_inner().unwrap();
    for process in 0..2 {
        let own = done
            .iter()
            .filter(|(of, _)| *of == process)
            .map(|(_, number)| *number);
        assert_eq!(
            own.collect::<Vec<u32>>(),
            (0..2 * WORK).collect::<Vec<u32>>()
        );
    }
}

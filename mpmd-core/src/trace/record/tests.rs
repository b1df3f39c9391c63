//! Tests of recording.

use super::*;
use mpmd_record::trace::ProcessTrace;

#[test]
fn recorded_events_are_read_back_with_texts() {
    let folder = std::env::temp_dir().join(format!("mpmd-record-{}", std::process::id()));
    let (trace, at) = (Trace::default(), Location::caller());
    let early = trace.wait("a wait that begins before the trace", at);
    let about = TraceHeader {
        process: 3,
        processes: 4,
        ..TraceHeader::default()
    };
    trace.begin(&folder, about).unwrap();
    let what = Arc::new("a kernel".to_owned());
    trace.issued(1, None, at, None, || what.clone());
    trace.issued(2, None, at, Some(1), || what.clone());
    drop(early);
    drop(trace.wait("a read", at));
    thread::scope(|scope| {
        for device in 0..4 {
            let trace = &trace;
            scope.spawn(move || {
                for op in 0..5_000 {
                    trace.note(|| TraceEventKind::Ended {
                        op,
                        device,
                        memory: 0,
                    });
                }
            });
        }
    });
    let schedule = Schedule::gpipe(2, 1).unwrap();
    trace.schedule(&schedule);
    trace.schedule(&schedule);
    trace.clock(trace.now(), 6, 7);
    trace.close();
    trace.note(|| TraceEventKind::Over { op: 1 });
    let read = ProcessTrace::read(&folder.join(file::name(3))).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(
        (
            read.about.process,
            read.truncated.clone(),
            read.dropped,
            read.ended
        ),
        (3, None, 0, true)
    );
    let issued: Vec<_> = read
        .events
        .iter()
        .filter_map(|event| match event.what {
            TraceEventKind::Issued {
                op,
                text,
                line,
                source,
                ..
            } => Some((op, read.text(text), read.text(line), source)),
            _ => None,
        })
        .collect();
    let line = at.to_string();
    assert_eq!(
        issued,
        [(1, "a kernel", &*line, 0), (2, "a kernel", &*line, 1)]
    );
    let ended = read
        .events
        .iter()
        .filter(|event| matches!(event.what, TraceEventKind::Ended { .. }))
        .count();
    assert_eq!(ended, 20_000);
    assert!(read.events.is_sorted_by_key(|event| event.at));
    let is_read = |text| read.text(text) == "a read";
    let is_wait = |event: &TraceEvent| match event.what {
        TraceEventKind::Waited { text, .. } => is_read(text),
        _ => false,
    };
    assert!(read.events.iter().any(is_wait));
    let since_begin = |event: &TraceEvent| {
        matches!(event.what, TraceEventKind::Waited { since: 0, text, .. }
            if read.text(text).contains("before the trace"))
    };
    assert!(read.events.iter().any(since_begin));
    assert_eq!(read.clocks.len(), 1);
    assert_eq!(
        read.schedules,
        [(schedule.name().to_owned(), "0F0,0B0\n1F0,1B0".to_owned())]
    );
}

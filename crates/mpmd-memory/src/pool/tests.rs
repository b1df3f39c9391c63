//! Classes of sizes, reuse, limits and reservations of the pool.

use super::*;

#[test]
fn classes_are_aligned_and_waste_at_most_a_quarter() {
    for bytes in (0..5000).chain([1 << 20, (1 << 20) + 1, 100_000_000]) {
        let class = size_class(bytes).unwrap();
        assert!(class >= bytes && class.is_multiple_of(ALIGNMENT));
        assert!(
            bytes < 256 || class - bytes <= bytes / 4,
            "{bytes} -> {class}"
        );
    }
}

#[test]
fn impossible_lengths_are_refused_and_not_counted() {
    for limit in [None, Some(u64::MAX), Some(1000)] {
        let pool = Pool::new("test", limit);
        let before = pool.allocate(1).unwrap();
        let figures = |PoolStats {
                           live,
                           reserved,
                           mapped,
                           ..
                       }| [live, reserved, mapped];
        let at_first = figures(pool.stats());
        for bytes in [
            usize::MAX,
            usize::MAX - 63,
            (1 << 63) + 1,
            1 << 63,
            (1 << 63) - 1,
        ] {
            assert_eq!(Pool::rounded(bytes), u64::MAX);
            assert_eq!(pool.reserve(bytes).unwrap_err().asked, bytes as u64);
            assert!(pool.allocate(bytes).is_err());
            assert!(
                pool.reserve_all([bytes, bytes, 1].into_iter().collect())
                    .is_err()
            );
        }
        let quarter = 1 << 62;
        assert!(
            pool.allocate(quarter).is_err(),
            "the system has no room for it"
        );
        assert!(
            pool.reserve_all([quarter; 4].into_iter().collect())
                .is_err(),
            "together they wrap to nothing"
        );
        let most = [64, usize::MAX].into_iter();
        assert!(pool.reserve(64).unwrap().allocate_all(most).is_err());
        assert_eq!(figures(pool.stats()), at_first);
        drop(before);
    }
}

#[test]
fn blocks_are_aligned_disjoint_and_reused() {
    let pool = Pool::new("test", None);
    let mut buffers: Vec<_> = (0..100).map(|i| pool.allocate(i * 777).unwrap()).collect();
    for (i, buffer) in buffers.iter_mut().enumerate() {
        assert_eq!(buffer.as_ptr() as usize % ALIGNMENT, 0);
        buffer.fill(i as u8);
    }
    for (i, buffer) in buffers.iter().enumerate() {
        assert!(buffer.iter().all(|byte| *byte == i as u8));
    }
    let mapped = pool.stats().mapped;
    drop(buffers);
    assert_eq!(pool.stats().live, 0);
    let again: Vec<_> = (0..100).map(|i| pool.allocate(i * 777).unwrap()).collect();
    assert_eq!(
        pool.stats().mapped,
        mapped,
        "a second round takes nothing new from the system"
    );
    drop(again);
}

#[test]
fn limit_covers_live_plus_reserved() {
    let pool = Pool::new("test", Some(1000));
    let reserved = pool.reserve(512).unwrap();
    let error = pool.allocate(512).unwrap_err();
    assert_eq!(
        (error.asked, error.reserved, error.limit),
        (512, 512, Some(1000))
    );
    let buffer = reserved.allocate().unwrap();
    assert_eq!((pool.stats().live, pool.stats().reserved), (512, 0));
    assert!(pool.reserve(512).is_err());
    drop(buffer);
    let reserved = pool.reserve(512).unwrap();
    assert!(pool.allocate(512).is_err(), "a cached block counts, too");
    drop(reserved);
    drop(pool.allocate(512).unwrap());
    let PoolStats {
        live,
        reserved,
        cached,
        peak,
        recent_peak,
        ..
    } = pool.stats();
    assert_eq!(
        (live, reserved, cached, peak, recent_peak),
        (0, 0, 512, 512, 512)
    );
    pool.trim();
}

#[test]
fn held_values_count_until_their_last_holder() {
    let (pool, other) = (Pool::new("test", Some(1000)), Pool::new("other", None));
    let values = SharedBuffer::from(vec![7; 512]);
    let held = pool.reserve(512).unwrap().hold_for(values.clone());
    assert!(held.is_counted_by(&pool) && held.is_limited() && held.same_place(&values));
    assert!(!held.is_counted_by(&other) && !values.is_counted_by(&pool));
    let part = held.slice(3..5);
    drop((values, held));
    assert_eq!((&part[..], pool.stats().live), (&[7, 7][..], 512));
    assert!(pool.reserve(512).is_err());
    drop(part);
    assert_eq!((pool.stats().live, pool.stats().reserved), (0, 0));
    let own = pool.allocate(100).unwrap().freeze();
    assert!(own.slice(1..2).is_counted_by(&pool) && !own.is_counted_by(&other));
}

#[test]
fn last_holder_takes_the_room_of_held_values() {
    let pool = Pool::new("test", Some(1000));
    let values = SharedBuffer::from(vec![7; 512]);
    let mut held = pool.reserve(512).unwrap().hold_for(values.clone());
    let mut part = held.slice(0..256);
    assert!(
        held.take_room().is_none() && part.take_room().is_none(),
        "both count"
    );
    assert_eq!(pool.stats().live, 512);
    drop(held);
    let room = part.take_room().unwrap();
    assert_eq!(
        (room.bytes(), pool.stats().live, pool.stats().reserved),
        (256, 0, 256)
    );
    let own = room.allocate().unwrap();
    assert_eq!(
        (own.len(), &part[..2], pool.stats().live),
        (256, &[7, 7][..], 256)
    );
    assert!(part.take_room().is_none() && !part.is_counted_by(&pool));
    let PoolStats {
        peak, peak_live, ..
    } = pool.stats();
    assert_eq!((peak, peak_live), (512, 512));
}

#[test]
fn same_values_count_once_for_each_hold() {
    let pool = Pool::new("test", None);
    let values = SharedBuffer::from(vec![7; 512]);
    let [one, other] = [(); 2].map(|()| pool.reserve(512).unwrap().hold_for(values.clone()));
    assert!(!one.counts_with(&other) && one.counts_with(&one.slice(0..512)));
    assert!(!one.counts_with(&one.slice(0..256)));
    let own = pool.allocate(512).unwrap().freeze();
    let elsewhere = Pool::new("other", None)
        .reserve(512)
        .unwrap()
        .hold_for(own.clone());
    assert!(own.counts_with(&own.clone()) && own.counts_with(&elsewhere));
}

#[test]
fn refusal_has_its_bytes_in_units() {
    let pool = Pool::new("device 0", Some(3 << 20));
    let _held = pool.allocate(2 << 20).unwrap();
    assert_eq!(
        pool.reserve(3 << 19).unwrap_err().to_string(),
        "device 0: 1.5 MiB asked for, 2.0 MiB in use and 0 B reserved of a limit of 3.0 MiB"
    );
}

#[test]
fn lent_blocks_come_back_before_more_is_mapped() {
    let arena = Arena::shared().unwrap();
    let pool = Pool::in_arena("test", Some(6 << 20), &arena);
    assert!(
        Pool::new("private", None)
            .allocate(100)
            .unwrap()
            .freeze()
            .place()
            .is_none()
    );
    let lent = Arc::new(Mutex::new(Vec::new()));
    let back = lent.clone();
    arena.on_shortage(move || back.lock().clear());
    for bytes in [100, 3 << 20] {
        let mut buffer = pool.allocate(bytes).unwrap();
        buffer[64..68].copy_from_slice(&[1, 2, 3, 4]);
        let part = buffer.freeze().slice(65..67);
        let SegmentPosition { segment, offset } = part.place().unwrap();
        assert_eq!(segment.lent(offset..offset + 2).unwrap(), [2, 3]);
        assert_eq!(segment.number(&arena), segment.number(&arena));
        lent.lock().push(part);
    }
    let mapped = pool.stats().mapped;
    let again = pool.allocate(3 << 20).unwrap();
    assert_eq!(
        pool.stats().mapped,
        mapped,
        "the lent block was brought back"
    );
    lent.lock().push(again.freeze());
    drop(pool.reserve(4 << 20).unwrap());
    assert_eq!(
        (pool.stats().live, lent.lock().len()),
        (0, 0),
        "lent blocks come back at the limit too"
    );
    assert!(arena.take_retired().is_empty());
    pool.trim();
    let retired: Vec<u32> = arena
        .take_retired()
        .into_iter()
        .map(|segment| segment.number)
        .collect();
    assert_eq!(
        retired,
        [1],
        "the segment of the large block had the second number"
    );
}

#[test]
fn cache_is_bounded_over_many_sizes() {
    let pool = Pool::new("test", None);
    for i in 0..100 {
        drop(pool.allocate((1 << 20) + i * (256 << 10)).unwrap());
    }
    let PoolStats {
        cached, peak_live, ..
    } = pool.stats();
    assert!(cached <= 2 * peak_live + KEPT_BESIDE, "{cached}");
}

#[test]
fn small_blocks_serve_smaller_classes() {
    let pool = Pool::new("test", None);
    let round =
        |bytes: usize| -> Vec<_> { (0..100).map(|_| pool.allocate(bytes).unwrap()).collect() };
    drop(round(500 << 10));
    let mapped = pool.stats().mapped;
    for bytes in [440 << 10, 380 << 10, 300 << 10] {
        let buffers = round(bytes);
        assert_eq!(pool.stats().live, 100 * Pool::rounded(bytes));
        drop(buffers);
        assert_eq!(pool.stats().live, 0);
    }
    assert_eq!(pool.stats().mapped, mapped);
    let cached = pool.stats().cached;
    drop(round(300 << 10));
    assert_eq!(
        pool.stats().cached,
        cached,
        "larger blocks come back with their whole size"
    );
    drop(round(100 << 10));
    assert!(
        pool.stats().mapped > mapped,
        "blocks above twice the size stay free"
    );
}

#[test]
fn blocks_used_before_do_not_decide_what_fits() {
    let pool = Pool::new("test", Some(16 << 20));
    let round = |bytes: usize| -> Vec<_> {
        let count = (16 << 20) / Pool::rounded(bytes);
        let buffers = (0..count).map(|_| pool.allocate(bytes).unwrap()).collect();
        assert!(pool.reserve(bytes).is_err(), "no more than the limit");
        buffers
    };
    // The smaller buffers get larger blocks.
    for bytes in [512 << 10, 256 << 10, 320 << 10, 512 << 10] {
        drop(round(bytes));
    }
    assert_eq!(pool.stats().peak, 16 << 20);
}

#[test]
fn several_buffers_are_reserved_all_or_none() {
    let pool = Pool::new("test", Some(4 << 20));
    let sizes = [512, 1 << 20, 1, 0];
    let error = pool
        .reserve_all([4 << 20, 1].into_iter().collect())
        .unwrap_err();
    assert_eq!(
        (error.asked, error.reserved),
        ((4 << 20) + 1, 0),
        "all or none"
    );
    let together = sizes.map(Pool::rounded).iter().sum::<u64>();
    let reserved = pool.reserve_all(sizes.into_iter().collect()).unwrap();
    assert_eq!(
        (reserved.bytes(), pool.stats().reserved),
        (sizes.iter().sum(), together)
    );
    let buffers = reserved.allocate_all(sizes.into_iter()).unwrap();
    assert_eq!(
        buffers
            .iter()
            .map(|buffer| buffer.len())
            .collect::<Vec<_>>(),
        sizes
    );
    assert_eq!((pool.stats().live, pool.stats().reserved), (together, 0));
    drop(buffers);
    assert_eq!((pool.stats().live, pool.stats().cached), (0, together));
}

#[test]
fn excess_buffers_are_refused_and_rest_is_released() {
    let pool = Pool::new("test", None);
    let reserved = pool.reserve_all([64, 64].into_iter().collect()).unwrap();
    assert_eq!(
        reserved
            .allocate_all([64, 64, 1].into_iter())
            .unwrap_err()
            .asked,
        1
    );
    assert_eq!((pool.stats().live, pool.stats().reserved), (0, 0));
    let reserved = pool.reserve_all([64, 640].into_iter().collect()).unwrap();
    let buffers = reserved.allocate_all([64].into_iter()).unwrap();
    assert_eq!((pool.stats().live, pool.stats().reserved), (64, 0));
    drop(buffers);
}

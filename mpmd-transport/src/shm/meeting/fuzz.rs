//! Fuzzes the hello packets of strangers.

use std::time::Duration;

use super::*;

#[test]
fn fuzz_shm_meeting() {
    let peer_timeout = Duration::from_secs(1);
    let peers = vec![None, None, None];
    let config = ShmConfig { process: ProcessId(0), peers, token: [7; 32], epoch: 3, peer_timeout };
    let own = OwnDoor::new().unwrap();
    let sample = hello(&ShmConfig { process: ProcessId(2), ..config.clone() });
    mpmd_fuzz::bytes("shm-meeting", &[sample.as_bytes().to_vec()], |bytes| {
        // The number of descriptors depends on the packet, but not on the fields that are checked.
        let count = bytes.len() % 3;
        let descriptors =
            (0..count).map(|_| own.memory.as_fd().try_clone_to_owned().unwrap()).collect();
        let is_whole = bytes.len() == size_of::<Hello>();
        let found = check(Packet { bytes: bytes.to_vec(), descriptors }, &config, 1);
        if let Some((process, descriptors)) = found {
            assert!(is_whole && count == 1 && descriptors.len() == 1);
            let said = ShmConfig { process: ProcessId(process as u32), ..config.clone() };
            assert_eq!(hello(&said).as_bytes(), bytes);
        }
    });
}

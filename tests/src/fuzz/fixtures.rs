//! Fixture files.

use pto_mock::fixtures::Fixture;

/// Any bytes are read or refused with a reason, and what was read makes requests or says why not.
///
/// # Panics
///
/// Where a claim does not hold.
pub fn fixtures(bytes: &[u8]) {
    let fixture = match Fixture::parse(bytes) {
        Ok(fixture) => fixture,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    for program in &fixture.programs {
        assert_eq!(fixture.program(&program.name).ok(), Some(program), "names are unique");
        for domain in &program.domains {
            for chips in [0, 1, 2, 64] {
                match domain.to_request(chips) {
                    Ok(request) => {
                        assert_eq!(request.workers.len(), chips as usize);
                        let named: u128 = request.buffers.iter().map(|b| u128::from(b.nbytes)).sum();
                        assert!(named <= u128::from(request.window_bytes), "{named} bytes in {request:?}");
                    }
                    Err(error) => assert!(!error.to_string().is_empty()),
                }
            }
        }
    }
}

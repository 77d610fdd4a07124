//! Which programs of a fixture are prepared.

use pto_mock::fixtures::{Fixture, ProgramFixture};

/// The pair that makes a model the default.
const PAIR: [&str; 2] = ["prefill_fwd", "decode_fwd"];

/// A name that the fixture does not have.
#[derive(Debug, thiserror::Error)]
#[error("no program or model {requested:?}; the fixture has {}", known.join(", "))]
pub(crate) struct UnknownName {
    requested: String,
    known: Vec<String>,
}

/// The programs that `names` ask for, each once, in the order asked for; without names the default.
///
/// # Errors
///
/// [`UnknownName`].
pub(crate) fn select<'a>(fixture: &'a Fixture, names: &[String]) -> Result<Vec<&'a ProgramFixture>, UnknownName> {
    if names.is_empty() {
        let mut models = fixture.programs.iter().map(|p| model(&p.name));
        return Ok(models.find_map(|m| pair(fixture, m)).unwrap_or_else(|| fixture.programs.iter().collect()));
    }
    let mut selected: Vec<&ProgramFixture> = Vec::new();
    for name in names {
        let found = match fixture.program(name) {
            Ok(program) => vec![program],
            Err(_) => pair(fixture, name)
                .unwrap_or_else(|| fixture.programs.iter().filter(|p| model(&p.name) == name).collect()),
        };
        if found.is_empty() {
            let known = fixture.programs.iter().map(|p| p.name.clone()).collect();
            return Err(UnknownName { requested: name.clone(), known });
        }
        for program in found {
            if !selected.iter().any(|s| s.name == program.name) {
                selected.push(program);
            }
        }
    }
    Ok(selected)
}

fn model(name: &str) -> &str {
    name.split_once('/').map_or(name, |(model, _)| model)
}

fn pair<'a>(fixture: &'a Fixture, model: &str) -> Option<Vec<&'a ProgramFixture>> {
    PAIR.iter().map(|program| fixture.program(&format!("{model}/{program}")).ok()).collect()
}

//! With the feature `simpler`: makes libpython findable for this package's own tests and examples, and names the
//! interpreter for an example that runs on the stand-in.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if let Ok(directory) = std::env::var("DEP_PTO_PYTHON_LIB_DIR") {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{directory}");
    }
    // The interpreter itself, not a virtual environment around it in which a real Simpler may be installed.
    if let Ok(executable) = std::env::var("DEP_PTO_PYTHON_EXECUTABLE")
        && let Ok(executable) = std::fs::canonicalize(executable)
    {
        println!("cargo:rustc-env=PTO_BASE_PYTHON={}", executable.display());
    }
}

//! Makes libpython findable at run time, where the feature `simpler` links it.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if let Ok(directory) = std::env::var("DEP_PTO_PYTHON_LIB_DIR") {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{directory}");
    }
}

//! With the feature `simpler`: tells the crate which interpreter it is linked to and makes libpython findable at run
//! time. Without it: nothing.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "simpler")]
    python();
}

/// The library directory becomes an rpath of this package's own tests and examples, and `DEP_PTO_PYTHON_LIB_DIR` for
/// the build scripts of packages that depend on this one (Cargo does not hand link arguments on to them).
#[cfg(feature = "simpler")]
fn python() {
    let config = pyo3_build_config::get();
    if let Some(executable) = config.executable() {
        println!("cargo:rustc-env=PTO_BUILD_PYTHON={executable}");
        println!("cargo:executable={executable}");
    }
    if config.shared()
        && let Some(directory) = config.lib_dir()
    {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{directory}");
        println!("cargo:lib_dir={directory}");
    }
}

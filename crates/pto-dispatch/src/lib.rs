//! PreparedWorker: persistent dispatch of PTO programs over any backend.

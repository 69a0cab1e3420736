//! Slices in GPU memory, over the CUDA driver that is made of host memory: in how few copies they come.

use thruway::{Device, LoadOptions, Session};
use thruway_testkit::fake_cuda::FakeCuda;

#[test]
fn a_slice_of_columns_comes_in_few_copies_of_many_rows() {
    const ROWS: usize = 3000;
    const COLUMNS: usize = 700;
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory for scratch files");
    let path = directory.path().join("model.safetensors");
    let whole: Vec<u8> = (0..ROWS * COLUMNS).map(|at| (at * 31 % 251).to_le_bytes()[0]).collect();
    let text = format!(r#"{{"matrix":{{"dtype":"U8","shape":[{ROWS},{COLUMNS}],"data_offsets":[0,{}]}}}}"#, whole.len());
    std::fs::write(&path, [&(text.len() as u64).to_le_bytes(), text.as_bytes(), &whole].concat()).expect("write");
    let fake = FakeCuda::start("DELAY_US=0..300");
    let session = Session::builder().device(Device::Cuda(0)).cuda_library(fake.path()).build().expect("session");
    let model = session.open(&path).expect("open");
    for (policy, columns) in [("cached", 3..690), ("staged", 0..1), ("staged", 650..700), ("auto", 100..101)] {
        let before = fake.calls("cuMemcpyHtoDAsync_v2") + fake.calls("cuMemcpy2DAsync_v2");
        let options = LoadOptions::all().slice("matrix", 1, columns.start as u64..columns.end as u64);
        let (loaded, _) = model.load(options.path(policy.parse().expect("a policy"))).expect("load");
        let found = loaded.get("matrix").expect("loaded").to_host().expect("readable");
        let wanted: Vec<u8> = whole.chunks(COLUMNS).flat_map(|row| &row[columns.clone()]).copied().collect();
        assert!(found == wanted, "{policy} {columns:?}");
        let copies = fake.calls("cuMemcpyHtoDAsync_v2") + fake.calls("cuMemcpy2DAsync_v2") - before;
        assert!(copies <= ROWS as u64 / 64, "{policy} {columns:?}: {copies} copies");
    }
    drop((session, model));
    fake.assert_clean();
}

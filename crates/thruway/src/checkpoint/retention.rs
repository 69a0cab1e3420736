//! Which checkpoints stay. Pure.

/// How many checkpoints stay. Everything does unless told otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    /// The newest so many stay. The newest of all stays whatever is asked for.
    pub keep: Option<usize>,
    /// Those whose step is a multiple of this stay for good.
    pub keep_every: Option<u64>,
}

impl Retention {
    /// Which of `whole` go: steps whose checkpoints are all there. Those that are not are neither counted nor named: whoever
    /// looks at them decides.
    pub(super) fn superseded(&self, whole: &[u64]) -> Vec<u64> {
        let Some(keep) = self.keep else { return Vec::new() };
        let mut newest_first = whole.to_vec();
        newest_first.sort_unstable_by(|a, b| b.cmp(a));
        let stays = |step: &u64| self.keep_every.is_some_and(|every| every > 0 && step.is_multiple_of(every));
        let mut gone: Vec<u64> = newest_first.into_iter().skip(keep.max(1)).filter(|step| !stays(step)).collect();
        gone.reverse();
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_stay_and_so_do_the_milestones() {
        let whole = [100, 200, 300, 400, 500, 600];
        let superseded = |keep, keep_every| Retention { keep, keep_every }.superseded(&whole);
        assert_eq!(superseded(None, None), [0; 0]);
        assert_eq!(superseded(None, Some(300)), [0; 0]);
        assert_eq!(superseded(Some(2), None), [100, 200, 300, 400]);
        assert_eq!(superseded(Some(2), Some(200)), [100, 300]);
        assert_eq!(superseded(Some(9), None), [0; 0]);
        assert_eq!(superseded(Some(2), Some(0)), [100, 200, 300, 400]);
    }

    #[test]
    fn the_newest_that_is_whole_stays_whatever_is_asked_for() {
        assert_eq!(Retention { keep: Some(0), keep_every: None }.superseded(&[3, 1, 2]), [1, 2]);
        assert_eq!(Retention { keep: Some(0), keep_every: None }.superseded(&[7]), [0; 0]);
    }
}

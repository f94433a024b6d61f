//! The values of contexts: a chain of `Arc`s towards the root, one link per value.

use std::any::Any;
use std::sync::Arc;

/// One value, and those above it.
pub(super) struct Values {
    value: Box<dyn Any + Send + Sync>,
    above: Option<Arc<Values>>,
}

impl Values {
    pub(super) fn add<T: Any + Send + Sync>(above: Option<Arc<Values>>, value: T) -> Arc<Values> {
        Arc::new(Values { value: Box::new(value), above })
    }

    /// Returns the value of type `T` that was added last, here or above.
    pub(super) fn find<T: Any>(&self) -> Option<&T> {
        let mut next = Some(self);
        while let Some(values) = next {
            if let Some(value) = values.value.downcast_ref() {
                return Some(value);
            }
            next = values.above.as_deref();
        }
        None
    }
}

impl Drop for Values {
    fn drop(&mut self) {
        // A loop, not a recursion: contexts may be nested too deeply for a stack.
        let mut above = self.above.take();
        while let Some(mut values) = above.take().and_then(Arc::into_inner) {
            above = values.above.take();
        }
    }
}

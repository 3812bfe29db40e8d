"""The eager torch model: the specification every other form of the drafter is proven against."""

"""What a run may change, and how it is put back: attributes and kinds of objects -> contents of tensors -> a snapshot -> put back."""

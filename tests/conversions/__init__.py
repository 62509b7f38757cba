"""What torchair and npugraph_ex make of every fused example and model, up to the last step that needs no device."""

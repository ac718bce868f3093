"""Where batches lie between the phases of a step: in memory, on a disk, or in TransferQueue."""

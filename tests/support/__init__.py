"""What tests share: rigs, boxes, fakes of servers, players of recorded traces."""

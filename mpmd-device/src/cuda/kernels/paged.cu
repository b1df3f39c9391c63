// paged
